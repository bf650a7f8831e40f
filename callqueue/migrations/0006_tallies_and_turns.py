from django.db import migrations, models


def tune_tables(apps, schema_editor):
    """Storage settings on PostgreSQL; on MariaDB and MySQL whole indexes, and text that is told
    apart by its characters.
    """
    from callqueue.database import tell_text_apart, tune_new_tables

    tune_new_tables(schema_editor)
    tell_text_apart(schema_editor, ["callqueue_tally", "callqueue_keyturn"])


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0005_keys_told_apart")]

    operations = [
        migrations.CreateModel(
            name="KeyTurn",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("rule", models.CharField(max_length=100)),
                ("priority", models.SmallIntegerField()),
                ("key", models.CharField(blank=True, max_length=255)),
                ("served", models.BigIntegerField(default=0)),
                ("blocked_on", models.CharField(blank=True, default="", max_length=32)),
                ("blocked_until", models.BigIntegerField(default=0)),
            ],
            options={
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("rule", "key", "priority"), name="callqueue_one_turn"
                    )
                ],
                "indexes": [
                    models.Index(
                        models.F("rule"),
                        models.F("blocked_on"),
                        models.OrderBy(models.F("priority"), descending=True),
                        models.F("served"),
                        models.F("id"),
                        name="callqueue_turns",
                    ),
                    models.Index(
                        models.F("rule"),
                        models.F("blocked_until"),
                        condition=models.Q(("blocked_on", ""), _negated=True),
                        name="callqueue_turns_blocked",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Tally",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("budget", models.CharField(max_length=150)),
                ("value", models.CharField(max_length=255)),
                ("used", models.BigIntegerField(default=0)),
                ("full_at", models.BigIntegerField(default=0)),
            ],
            options={
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(fields=("budget", "value"), name="callqueue_one_tally")
                ],
            },
        ),
        migrations.AddField(
            model_name="callattempt",
            name="charged",
            field=models.JSONField(editable=False, null=True),
        ),
        migrations.AddField(
            model_name="callattempt",
            name="correction_pending",
            field=models.BooleanField(db_default=False, default=False, editable=False),
        ),
        migrations.AddIndex(
            model_name="callattempt",
            index=models.Index(
                models.F("rule"),
                condition=models.Q(("correction_pending", True)),
                name="callqueue_corrections",
            ),
        ),
        migrations.RunPython(tune_tables, migrations.RunPython.noop, atomic=False),
    ]
