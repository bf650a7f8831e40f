from django.db import migrations


def let_calls_wake(apps, schema_editor):
    """On PostgreSQL only: see callqueue/dispatch/listener.py."""
    from callqueue.database import let_calls_wake

    let_calls_wake(schema_editor)


def let_calls_be_silent(apps, schema_editor):
    from callqueue.database import let_calls_be_silent

    let_calls_be_silent(schema_editor)


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0003_reconcile_and_traces")]

    operations = [migrations.RunPython(let_calls_wake, let_calls_be_silent)]
