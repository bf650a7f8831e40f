from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("callqueue", "0015_dispenser_reading")]

    operations = [
        migrations.AddField(
            model_name="total",
            name="lost",
            field=models.PositiveIntegerField(db_default=0, default=0),
        ),
    ]
