from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="callqueue",
            name="reconcile_at",
            field=models.DateTimeField(editable=False, null=True),
        ),
        migrations.AddField(
            model_name="callqueue",
            name="reconcile_count",
            field=models.PositiveSmallIntegerField(db_default=0, default=0, editable=False),
        ),
        migrations.AddField(
            model_name="callqueue",
            name="trace_context",
            field=models.CharField(editable=False, max_length=64, null=True),
        ),
    ]
