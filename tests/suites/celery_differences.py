"""Tests of Celery's integration suite that tell QueuedTask from Celery's Task, and why. The docs
say the same: docs/how-to/limit-a-celery-task.md.
"""

STAMPS = "revoke_by_stamped_headers is the workers' own, and calls do not see it"
LIMITS = "time limits are refused when the task is sent, and named"
RECEIVED = "task_received is sent for the message that brings the call"
SUBSCRIBED = "the result is subscribed to by get(), not when the task is sent"
LOGS = "the worker logs the message that it received, callqueue.make_api_call"
DOUBLED = "it doubles messages in RabbitMQ by the task's name; a call's message has another"
LARGE = "a thousand calls, by one worker process: whether the time is enough depends on the machine"
ERRBACKS = (
    "it waits for the first of 42 errbacks, and asks for the others at once; each is a call, and one "
    "worker process may not have made them all"
)

DIFFERENCES: dict[str, str] = {
    "test_tasks::test_revoked_by_headers_simple_canvas": STAMPS,
    "test_tasks::test_soft_time_limit_exceeding_time_limit": LIMITS,
    "test_chain::test_chord_soft_timeout_recuperation": LIMITS,
    "test_chain::test_chord_header_id_duplicated_on_rabbitmq_msg_duplication": DOUBLED,
    "test_trace_log_arguments::test_task_success": LOGS,
    "test_trace_log_arguments::test_task_failed": LOGS,
    "test_task_redis_result_backend::test_asyncresult_forget_cancels_subscription": SUBSCRIBED,
    "test_task_redis_result_backend::test_asyncresult_get_cancels_subscription": SUBSCRIBED,
    "test_stamping_mechanism::test_linking_stamped_sig": RECEIVED,
    "test_stamping_mechanism::test_err_linking_stamped_sig": RECEIVED,
    "test_stamping_mechanism::test_stamps_remain_on_task_retry": RECEIVED,
}

# They may pass, and may fail.
MAY_DIFFER: dict[str, str] = {
    "test_group::test_large_group": LARGE,
    "test_chord::test_large_header": LARGE,
    "test_chord::test_chain_to_a_chord_with_large_header": LARGE,
    "test_chord::test_mutable_errback_called_by_chord_from_group_fail_multiple_on_body_failure": ERRBACKS,
}

# Not run, and counted as failures: they take minutes to say what another says.
LEFT_OUT: dict[str, str] = {
    "t/integration/test_tasks.py::test_tasks::test_revoked_by_headers_complex_canvas": STAMPS,
}
