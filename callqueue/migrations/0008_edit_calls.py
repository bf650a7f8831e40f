from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0007_opinions")]

    operations = [
        migrations.AlterModelOptions(
            name="callqueue",
            options={
                "ordering": ("-id",),
                "permissions": (
                    ("requeue_call", "Can requeue calls"),
                    ("edit_call", "Can edit the requests of calls and requeue them"),
                    ("cancel_call", "Can cancel calls"),
                    ("control_rule", "Can pause and resume rules and change their limits"),
                ),
                "verbose_name": "call",
                "verbose_name_plural": "calls",
            },
        )
    ]
