from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0009_spaces_told_apart_and_belated_endings")]

    operations = [
        migrations.AddField(
            model_name="dispenserstate",
            name="kind",
            field=models.CharField(db_default="", default="", editable=False, max_length=16),
        )
    ]
