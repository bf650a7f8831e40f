"""The dispenser: releases calls as fast as the limits allow, and hands them to Celery.

dispenser           the loop of a process
    membership      its signs of life, and what it agrees on with the other dispensers
    chores          what it does besides, and how often
    listener        what wakes it when a call is sent
    outbox          what it has released and has published
    rule_group      when a group of rules is looked at again, and
    next_look       what a pass concludes about that
release_pass        one pass over a group: lock, count, choose, charge, conclude
    choosing        candidates of every rule, and which of them go
        candidates_by_key   where keys take turns
        backpressure        by queues whose workers have room
        planning            within every limit, in memory
    charging        writes what goes
publisher           makes messages of what was charged
"""
