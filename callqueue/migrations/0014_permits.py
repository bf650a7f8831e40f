import django.db.models.deletion
from django.db import migrations, models

import callqueue.fields


def tell_text_apart(apps, schema_editor):
    """On MariaDB and MySQL, keys and rules of the new table differ as they do in the others."""
    from callqueue.database import tell_text_apart

    tell_text_apart(schema_editor, [apps.get_model("callqueue", "PermitRequest")._meta.db_table])


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0013_lists")]

    operations = [
        migrations.AddField(
            model_name="callattempt",
            name="label",
            field=models.CharField(
                blank=True, db_default="", default="", max_length=100, verbose_name="label"
            ),
        ),
        migrations.AlterField(
            model_name="callattempt",
            name="call",
            field=models.ForeignKey(
                blank=True,
                db_constraint=False,
                null=True,
                on_delete=django.db.models.deletion.DO_NOTHING,
                related_name="attempts",
                to="callqueue.callqueue",
                verbose_name="call",
            ),
        ),
        migrations.CreateModel(
            name="PermitRequest",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("rule", models.CharField(max_length=100)),
                ("key", models.CharField(blank=True, default="", max_length=255)),
                ("priority", models.SmallIntegerField(default=0)),
                ("cost", models.JSONField(default=callqueue.fields.one_call)),
                ("label", models.CharField(blank=True, default="", max_length=100)),
                ("owner", models.CharField(max_length=100)),
                ("due_at_dt", models.DateTimeField()),
                ("until", models.DateTimeField(null=True)),
                ("alive_until", models.DateTimeField()),
                ("attempt_id", models.BigIntegerField(null=True)),
            ],
            options={
                "default_permissions": (),
                "indexes": [
                    models.Index(
                        "rule",
                        models.F("priority").desc(),
                        "due_at_dt",
                        name="callqueue_permits_waiting",
                        condition=models.Q(attempt_id__isnull=True),
                    )
                ],
            },
        ),
        migrations.RunPython(tell_text_apart, migrations.RunPython.noop, atomic=False),
    ]
