from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0014_permits")]

    operations = [
        migrations.AddField(
            model_name="dispenserstate",
            name="reading",
            field=models.JSONField(editable=False, null=True),
        ),
    ]
