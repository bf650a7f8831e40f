from django.db import migrations, models


def tell_spaces_apart(apps, schema_editor):
    """On MariaDB and MySQL, text that differs in trailing spaces differs, as in case and
    accents.
    """
    from callqueue.database import tell_text_apart

    tell_text_apart(
        schema_editor,
        [model._meta.db_table for model in apps.get_app_config("callqueue").get_models()],
    )


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0008_edit_calls")]

    operations = [
        migrations.CreateModel(
            name="BelatedEnding",
            fields=[
                ("attempt_id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("call_id", models.BigIntegerField()),
                ("number", models.PositiveIntegerField()),
                ("columns", models.JSONField()),
            ],
            options={"default_permissions": ()},
        ),
        migrations.RunPython(tell_spaces_apart, migrations.RunPython.noop, atomic=False),
    ]
