from django.db import migrations


def tell_keys_apart(apps, schema_editor):
    """On MariaDB and MySQL, text that differs in case or accents differs, whatever the database's
    own collation.
    """
    from callqueue.database import tell_text_apart

    tell_text_apart(
        schema_editor,
        [model._meta.db_table for model in apps.get_app_config("callqueue").get_models()],
    )


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0004_calls_wake_dispensers")]

    operations = [migrations.RunPython(tell_keys_apart, migrations.RunPython.noop, atomic=False)]
