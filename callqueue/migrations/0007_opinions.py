from django.db import migrations, models


def gather_changed_limits(apps, schema_editor):
    """Operators' changed limits are kept in one row from now on, where no change of rules can lose
    them.
    """
    using = schema_editor.connection.alias
    rows = apps.get_model("callqueue", "RuleState").objects.using(using)
    rates = {}
    for of_rule in rows.exclude(rule="").order_by("rule").values_list("rates", flat=True):
        rates.update(of_rule or {})
    if rates:
        rows.get_or_create(rule="")
        rows.filter(rule="").update(rates=rates)
        rows.update(agreement="gathered")


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0006_tallies_and_turns")]

    operations = [
        migrations.AddField(
            model_name="rulestate",
            name="agreement",
            field=models.CharField(db_default="", default="", editable=False, max_length=16),
        ),
        migrations.AddField(
            model_name="dispenserstate",
            name="opinion",
            field=models.JSONField(editable=False, null=True),
        ),
        migrations.AddField(
            model_name="dispenserstate",
            name="digest",
            field=models.CharField(db_default="", default="", editable=False, max_length=16),
        ),
        migrations.RunPython(gather_changed_limits, migrations.RunPython.noop),
    ]
