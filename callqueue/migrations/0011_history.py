from django.db import migrations, models


def tune_history(apps, schema_editor):
    """Storage settings on PostgreSQL; on MariaDB and MySQL, text that is told apart by its
    characters.
    """
    from callqueue.database import tell_text_apart, tune_history

    tune_history(schema_editor)
    tell_text_apart(schema_editor, ["callqueue_total", "callqueue_peak"])


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0010_kinds_of_dispensers")]

    operations = [
        migrations.CreateModel(
            name="Counted",
            fields=[
                ("id", models.PositiveSmallIntegerField(primary_key=True, serialize=False)),
                ("until", models.BigIntegerField(default=0)),
                ("peaks_until", models.BigIntegerField(default=0)),
                ("frame", models.PositiveIntegerField(default=0)),
                ("pending", models.JSONField(default=list)),
            ],
            options={"default_permissions": ()},
        ),
        migrations.CreateModel(
            name="Peak",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("width", models.PositiveIntegerField()),
                ("start", models.BigIntegerField()),
                ("budget", models.CharField(max_length=150)),
                ("value", models.CharField(blank=True, default="", max_length=255)),
                ("highest", models.BigIntegerField(default=0)),
                ("allowed", models.BigIntegerField(default=0)),
                ("used", models.FloatField(default=0)),
                ("room", models.FloatField(default=0)),
            ],
            options={
                "default_permissions": (),
                "indexes": [
                    models.Index(models.F("width"), models.F("start"), name="callqueue_peaks")
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("budget", "width", "start"), name="callqueue_one_peak"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Total",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("width", models.PositiveIntegerField()),
                ("start", models.BigIntegerField()),
                ("rule", models.CharField(max_length=100)),
                ("key", models.CharField(blank=True, default="", max_length=255)),
                ("sent", models.PositiveIntegerField(default=0)),
                ("done", models.PositiveIntegerField(default=0)),
                ("failed", models.PositiveIntegerField(default=0)),
                ("throttled", models.PositiveIntegerField(default=0)),
                ("waits", models.JSONField(default=dict)),
                ("answers", models.JSONField(default=dict)),
            ],
            options={
                "default_permissions": (),
                "indexes": [
                    models.Index(models.F("width"), models.F("start"), name="callqueue_totals")
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("rule", "key", "width", "start"), name="callqueue_one_total"
                    )
                ],
            },
        ),
        migrations.RunPython(tune_history, migrations.RunPython.noop, atomic=False),
    ]
