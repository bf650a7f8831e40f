import django.db.models.deletion
from django.db import migrations, models

import callqueue.database
import callqueue.fields
import callqueue.history.sums


def finish(apps, schema_editor):
    """What no model says: see callqueue/database/schema.py."""
    from callqueue.database import finish_tables

    models = apps.get_app_config("callqueue").get_models()
    finish_tables(schema_editor, [model._meta.db_table for model in models])


def unfinish(apps, schema_editor):
    from callqueue.database import unfinish_tables

    unfinish_tables(schema_editor)


class Migration(migrations.Migration):
    initial = True
    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Sum",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("rule", models.CharField(max_length=100)),
                ("width", models.PositiveIntegerField()),
                ("start", models.BigIntegerField()),
                ("sent", models.BigIntegerField(default=0)),
                ("done", models.BigIntegerField(default=0)),
                ("failed", models.BigIntegerField(default=0)),
                ("throttled", models.BigIntegerField(default=0)),
                ("lost", models.BigIntegerField(default=0)),
                ("waits", models.JSONField(default=callqueue.history.sums.new_buckets)),
                ("answers", models.JSONField(default=callqueue.history.sums.new_buckets)),
            ],
            options={
                "default_permissions": (),
                "indexes": [models.Index(fields=["width", "start"], name="callqueue_sums")],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("rule", "width", "start"), name="callqueue_one_sum"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Summed",
            fields=[
                ("id", models.PositiveSmallIntegerField(primary_key=True, serialize=False)),
                ("until", models.BigIntegerField(default=0)),
                ("settled", models.BigIntegerField(default=0)),
            ],
            options={
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="BelatedEnding",
            fields=[
                ("attempt_id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("call_id", models.BigIntegerField()),
                ("number", models.PositiveIntegerField()),
                ("columns", models.JSONField()),
            ],
            options={
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="DispenserState",
            fields=[
                ("name", models.CharField(max_length=150, primary_key=True, serialize=False)),
                ("started_at", models.DateTimeField()),
                ("seen_at", models.DateTimeField()),
                (
                    "kind",
                    models.CharField(db_default="", default="", editable=False, max_length=16),
                ),
                (
                    "broker",
                    models.CharField(db_default="", default="", editable=False, max_length=255),
                ),
                (
                    "digest",
                    models.CharField(db_default="", default="", editable=False, max_length=16),
                ),
            ],
            options={
                "verbose_name": "dispenser",
                "verbose_name_plural": "dispensers",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="OpinionState",
            fields=[
                ("digest", models.CharField(max_length=16, primary_key=True, serialize=False)),
                ("limits", models.JSONField()),
                ("seen_at", models.DateTimeField()),
                ("lapsed_at", models.DateTimeField(null=True)),
            ],
            options={
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="LedgerState",
            fields=[
                ("id", models.PositiveSmallIntegerField(primary_key=True, serialize=False)),
                ("moved", models.BigIntegerField(default=0)),
                ("agreements", models.BigIntegerField(default=0)),
                ("agreed_at", models.BigIntegerField(default=0)),
            ],
            options={
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="SettingsState",
            fields=[
                ("id", models.PositiveSmallIntegerField(primary_key=True, serialize=False)),
                ("version", models.BigIntegerField(default=0)),
                ("rates", models.JSONField(default=dict)),
            ],
            options={
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="RuleState",
            fields=[
                ("rule", models.CharField(max_length=100, primary_key=True, serialize=False)),
                ("passes", models.BigIntegerField(default=0, editable=False)),
                ("served", models.BigIntegerField(default=0, editable=False)),
                ("memo", models.JSONField(default=dict, editable=False)),
                ("reconciling_until", models.DateTimeField(editable=False, null=True)),
            ],
            options={
                "verbose_name": "rule",
                "verbose_name_plural": "dashboard",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="CallQueue",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "status",
                    models.PositiveSmallIntegerField(
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
                ("rule", models.CharField(default="default", max_length=100, verbose_name="rule")),
                (
                    "queue",
                    models.CharField(blank=True, default="", max_length=100, verbose_name="queue"),
                ),
                (
                    "key",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="key"),
                ),
                ("priority", models.SmallIntegerField(default=0, verbose_name="priority")),
                ("cost", models.JSONField(default=callqueue.fields.one_call, verbose_name="cost")),
                (
                    "created_dt",
                    models.DateTimeField(
                        db_default=callqueue.database.ClockNow(),
                        editable=False,
                        verbose_name="created",
                    ),
                ),
                (
                    "due_at_dt",
                    models.DateTimeField(
                        db_default=callqueue.database.ClockNow(), verbose_name="due"
                    ),
                ),
                (
                    "expires_at_dt",
                    models.DateTimeField(blank=True, null=True, verbose_name="expires"),
                ),
                (
                    "dispatched_at_dt",
                    models.DateTimeField(
                        blank=True, editable=False, null=True, verbose_name="dispatched"
                    ),
                ),
                (
                    "finished_at_dt",
                    models.DateTimeField(
                        blank=True, editable=False, null=True, verbose_name="finished"
                    ),
                ),
                ("call_data", callqueue.fields.SealedJSONField(verbose_name="call data")),
                (
                    "method",
                    models.CharField(
                        blank=True,
                        default="",
                        editable=False,
                        max_length=100,
                        verbose_name="method",
                    ),
                ),
                (
                    "host",
                    models.CharField(
                        blank=True, default="", editable=False, max_length=255, verbose_name="host"
                    ),
                ),
                (
                    "path",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        editable=False,
                        max_length=255,
                        verbose_name="path",
                    ),
                ),
                (
                    "failed_count",
                    models.PositiveIntegerField(
                        default=0, editable=False, verbose_name="failed attempts"
                    ),
                ),
                (
                    "throttled_count",
                    models.PositiveIntegerField(
                        default=0, editable=False, verbose_name="throttled attempts"
                    ),
                ),
                (
                    "last_attempt",
                    models.PositiveIntegerField(default=0, editable=False, verbose_name="attempts"),
                ),
                (
                    "error_message",
                    callqueue.fields.ToldTextField(
                        blank=True, default="", editable=False, verbose_name="last error"
                    ),
                ),
                (
                    "unique_key",
                    models.CharField(
                        blank=True, max_length=255, null=True, verbose_name="unique key"
                    ),
                ),
                (
                    "callback",
                    models.CharField(
                        blank=True, max_length=255, null=True, verbose_name="callback"
                    ),
                ),
                ("ready", models.BooleanField(default=False, editable=False)),
                (
                    "idempotency_key",
                    models.UUIDField(default=callqueue.fields.new_idempotency_key, editable=False),
                ),
                ("first_sent_dt", models.DateTimeField(editable=False, null=True)),
                ("callback_pending", models.BooleanField(default=False, editable=False)),
                ("callback_at", models.DateTimeField(editable=False, null=True)),
                (
                    "callback_heard",
                    models.BooleanField(db_default=False, default=False, editable=False),
                ),
                ("callback_ask_at", models.DateTimeField(editable=False, null=True)),
                ("reconcile_at", models.DateTimeField(editable=False, null=True)),
                (
                    "reconcile_count",
                    models.PositiveSmallIntegerField(db_default=0, default=0, editable=False),
                ),
                ("trace_context", models.CharField(editable=False, max_length=64, null=True)),
            ],
            options={
                "verbose_name": "call",
                "verbose_name_plural": "calls",
                "ordering": ("-id",),
                "permissions": (
                    ("requeue_call", "Can requeue calls"),
                    ("edit_call", "Can edit the requests of calls and requeue them"),
                    ("cancel_call", "Can cancel calls"),
                    ("control_rule", "Can pause and resume rules and change their limits"),
                ),
                "indexes": [
                    models.Index(
                        models.F("rule"),
                        models.OrderBy(models.F("priority"), descending=True),
                        models.F("due_at_dt"),
                        models.F("id"),
                        condition=models.Q(("ready", True), ("status__in", (0, 2))),
                        name="callqueue_ready",
                    ),
                    models.Index(
                        models.F("rule"),
                        models.F("key"),
                        models.F("priority"),
                        models.F("due_at_dt"),
                        models.F("id"),
                        condition=models.Q(("ready", True), ("status__in", (0, 2))),
                        name="callqueue_ready_by_key",
                    ),
                    models.Index(
                        models.F("rule"),
                        models.F("key"),
                        condition=models.Q(
                            ("method", "permit"), ("ready", True), ("status__in", (0, 2))
                        ),
                        name="callqueue_permits",
                    ),
                    models.Index(
                        models.F("due_at_dt"),
                        condition=models.Q(("ready", False), ("status__in", (0, 2))),
                        name="callqueue_later",
                    ),
                    models.Index(
                        models.F("expires_at_dt"),
                        condition=models.Q(
                            ("expires_at_dt__isnull", False), ("status__in", (0, 2))
                        ),
                        name="callqueue_expiring",
                    ),
                    models.Index(fields=["rule", "id"], name="callqueue_of_rule"),
                    models.Index(
                        condition=models.Q(("status__in", (1, 2, 4, 5, 6, 7))),
                        fields=["status", "rule", "id"],
                        name="callqueue_of_status",
                    ),
                    models.Index(
                        models.F("status"),
                        models.F("finished_at_dt"),
                        condition=models.Q(("finished_at_dt__isnull", False)),
                        name="callqueue_finished",
                    ),
                    models.Index(
                        models.F("id"),
                        condition=models.Q(("callback_pending", True)),
                        name="callqueue_callbacks",
                    ),
                    models.Index(
                        models.F("unique_key"),
                        condition=models.Q(("unique_key__isnull", False)),
                        name="callqueue_unique_key",
                    ),
                    models.Index(
                        condition=models.Q(("key", ""), _negated=True),
                        fields=["key", "id"],
                        name="callqueue_keyed",
                        opclasses=("varchar_pattern_ops", "int8_ops"),
                    ),
                    models.Index(fields=["idempotency_key"], name="callqueue_idempotency_key"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Hold",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("rule", models.CharField(max_length=100, verbose_name="rule")),
                ("per", models.CharField(default="rule", max_length=100, verbose_name="per")),
                (
                    "value",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="value"),
                ),
                (
                    "source",
                    models.CharField(
                        choices=[
                            ("provider", "the provider"),
                            ("operator", "an operator"),
                            ("breaker", "the circuit breaker"),
                            ("restored", "a dispenser, after a restored backup"),
                        ],
                        default="operator",
                        max_length=16,
                        verbose_name="laid by",
                    ),
                ),
                (
                    "reason",
                    callqueue.fields.ToldTextField(blank=True, default="", verbose_name="reason"),
                ),
                (
                    "began_at",
                    models.DateTimeField(
                        db_default=callqueue.database.ClockNow(), verbose_name="since"
                    ),
                ),
                (
                    "until",
                    models.DateTimeField(
                        blank=True,
                        help_text="empty: until it is resumed",
                        null=True,
                        verbose_name="until",
                    ),
                ),
            ],
            options={
                "verbose_name": "hold",
                "verbose_name_plural": "holds",
                "default_permissions": ("view",),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("rule", "per", "value", "source"), name="callqueue_one_hold"
                    )
                ],
            },
        ),
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
                "indexes": [
                    models.Index(
                        fields=["rule", "blocked_on", "-priority", "served", "id"],
                        name="callqueue_turns",
                    ),
                    models.Index(
                        models.F("rule"),
                        models.F("blocked_until"),
                        condition=models.Q(("blocked_on", ""), _negated=True),
                        name="callqueue_turns_blocked",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("rule", "key", "priority"), name="callqueue_one_turn"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="KeyNews",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("rule", models.CharField(max_length=100)),
                ("priority", models.SmallIntegerField()),
                ("key", models.CharField(blank=True, max_length=255)),
            ],
            options={
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["rule", "-priority", "key"], name="callqueue_news")
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
        migrations.CreateModel(
            name="CallAttempt",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("number", models.PositiveIntegerField(verbose_name="number")),
                ("rule", models.CharField(max_length=100, verbose_name="rule")),
                (
                    "key",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="key"),
                ),
                (
                    "queue",
                    models.CharField(blank=True, default="", max_length=100, verbose_name="queue"),
                ),
                ("cost", models.JSONField(default=callqueue.fields.one_call, verbose_name="cost")),
                (
                    "calls",
                    models.PositiveIntegerField(
                        default=1, editable=False, verbose_name="cost in calls"
                    ),
                ),
                ("released_at", models.DateTimeField(verbose_name="released")),
                (
                    "send_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="to be sent at"),
                ),
                (
                    "lease_until",
                    models.DateTimeField(blank=True, null=True, verbose_name="lease until"),
                ),
                ("started_at", models.DateTimeField(blank=True, null=True, verbose_name="begun")),
                ("sent_at", models.DateTimeField(blank=True, null=True, verbose_name="sent")),
                (
                    "finished_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="finished"),
                ),
                (
                    "outcome",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("", "open"),
                            ("succeeded", "succeeded"),
                            ("failed", "failed"),
                            ("gave up", "gave up"),
                            ("throttled", "throttled"),
                            ("lost", "lost"),
                            ("voided", "voided, never sent"),
                        ],
                        default="",
                        max_length=16,
                        verbose_name="outcome",
                    ),
                ),
                (
                    "response_status",
                    models.PositiveSmallIntegerField(
                        blank=True, null=True, verbose_name="response status"
                    ),
                ),
                (
                    "response_headers",
                    callqueue.fields.ToldJSONField(
                        blank=True, null=True, verbose_name="response headers"
                    ),
                ),
                (
                    "response_body",
                    callqueue.fields.SealedTextField(
                        blank=True, default="", verbose_name="response body"
                    ),
                ),
                (
                    "response_form",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        editable=False,
                        max_length=20,
                        verbose_name="form of the body",
                    ),
                ),
                (
                    "response_size",
                    models.PositiveIntegerField(
                        blank=True, null=True, verbose_name="response size"
                    ),
                ),
                (
                    "error_message",
                    callqueue.fields.ToldTextField(blank=True, default="", verbose_name="error"),
                ),
                (
                    "worker",
                    models.CharField(blank=True, default="", max_length=100, verbose_name="worker"),
                ),
                ("charged", models.JSONField(editable=False, null=True)),
                (
                    "correction_pending",
                    models.BooleanField(db_default=False, default=False, editable=False),
                ),
                ("settled", models.BooleanField(db_default=False, default=False, editable=False)),
                (
                    "call",
                    models.ForeignKey(
                        db_constraint=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="attempts",
                        to="callqueue.callqueue",
                        verbose_name="call",
                    ),
                ),
            ],
            options={
                "verbose_name": "attempt",
                "verbose_name_plural": "attempts",
                "ordering": ("id",),
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        models.F("rule"),
                        condition=models.Q(("finished_at__isnull", True)),
                        name="callqueue_open",
                    ),
                    models.Index(
                        models.F("rule"),
                        models.F("finished_at"),
                        condition=models.Q(("finished_at__isnull", False)),
                        name="callqueue_aging",
                    ),
                    models.Index(
                        models.F("rule"),
                        models.F("key"),
                        models.F("finished_at"),
                        condition=models.Q(("key", ""), _negated=True),
                        name="callqueue_aging_by_key",
                    ),
                    models.Index(
                        condition=models.Q(
                            ("outcome__in", ("failed", "gave up", "throttled", "lost", "voided")),
                            ("response_status__gte", 300),
                            _connector="OR",
                        ),
                        fields=["rule", "outcome", "response_status", "finished_at", "id"],
                        name="callqueue_unusual",
                    ),
                    models.Index(
                        models.F("rule"),
                        condition=models.Q(("correction_pending", True)),
                        name="callqueue_corrections",
                    ),
                ],
            },
        ),
        # By itself: within CreateModel, Django fails where there are no conditions (MariaDB, MySQL).
        migrations.AddConstraint(
            model_name="callqueue",
            constraint=models.UniqueConstraint(
                condition=models.Q(("status__in", (0, 1, 2)), ("unique_key__isnull", False)),
                fields=("unique_key",),
                name="callqueue_active_key",
            ),
        ),
        migrations.RunPython(finish, unfinish, atomic=False),
    ]
