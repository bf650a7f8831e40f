from django.db import migrations, models

import callqueue.fields


def drop_key_index(apps, schema_editor):
    """On MariaDB and MySQL, the index on keys that the first migration made in Django's stead."""
    from callqueue.database import drop_whole_index

    drop_whole_index(schema_editor, "callqueue_callqueue", "callqueue_key")


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0012_task_ids")]

    operations = [
        migrations.RemoveIndex(model_name="callqueue", name="callqueue_unusual"),
        migrations.RemoveIndex(model_name="callqueue", name="callqueue_created"),
        migrations.RemoveIndex(model_name="callqueue", name="callqueue_key"),
        migrations.AddField(
            model_name="callqueue",
            name="path",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                editable=False,
                max_length=255,
                verbose_name="path",
            ),
        ),
        migrations.AlterField(
            model_name="callqueue",
            name="status",
            field=models.PositiveSmallIntegerField(
                choices=[
                    (0, "new"),
                    (1, "dispatched"),
                    (2, "will be retried"),
                    (3, "done"),
                    (4, "failed"),
                    (5, "cancelled"),
                    (6, "expired"),
                    (7, "unknown"),
                ],
                default=0,
                verbose_name="status",
            ),
        ),
        migrations.AlterField(
            model_name="callqueue",
            name="idempotency_key",
            field=models.UUIDField(default=callqueue.fields.new_idempotency_key, editable=False),
        ),
        migrations.AddIndex(
            model_name="callqueue",
            index=models.Index(
                fields=["rule", "status", "method", "created_dt", "id"],
                name="callqueue_listed",
            ),
        ),
        migrations.AddIndex(
            model_name="callqueue",
            index=models.Index(
                fields=["key", "created_dt", "id"],
                opclasses=("varchar_pattern_ops", "timestamptz_ops", "int8_ops"),
                name="callqueue_keyed",
                condition=models.Q(("key", ""), _negated=True),
            ),
        ),
        migrations.AddIndex(
            model_name="callqueue",
            index=models.Index(
                fields=["host", "path"],
                opclasses=("varchar_ops", "varchar_pattern_ops"),
                name="callqueue_target",
                condition=models.Q(("host", ""), _negated=True),
            ),
        ),
        migrations.AddIndex(
            model_name="callqueue",
            index=models.Index(fields=["idempotency_key"], name="callqueue_idempotency_key"),
        ),
        migrations.AddIndex(
            model_name="callattempt",
            index=models.Index(
                fields=["rule", "outcome", "response_status", "finished_at", "id"],
                name="callqueue_unusual",
                condition=models.Q(
                    ("outcome__in", ("failed", "gave up", "throttled", "lost", "voided")),
                    ("response_status__gte", 300),
                    _connector="OR",
                ),
            ),
        ),
        migrations.RunPython(drop_key_index, migrations.RunPython.noop, atomic=False),
    ]
