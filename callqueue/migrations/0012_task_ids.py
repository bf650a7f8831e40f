from django.db import migrations, models


def index_there(apps, schema_editor):
    """MariaDB and MySQL have no partial indexes."""
    from callqueue.database import index_task_ids

    index_task_ids(schema_editor)


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0011_history")]

    operations = [
        migrations.AddField(
            model_name="callqueue",
            name="task_id",
            field=models.CharField(editable=False, max_length=255, null=True),
        ),
        migrations.AddIndex(
            model_name="callqueue",
            index=models.Index(
                models.F("task_id"),
                condition=models.Q(task_id__isnull=False),
                name="callqueue_task",
            ),
        ),
        migrations.RunPython(index_there, migrations.RunPython.noop, atomic=False),
    ]
