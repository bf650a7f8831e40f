"""The dispenser: releases calls as fast as the limits allow, and hands them to Celery.

dispenser           the loop of a process, and what wakes it when a call is sent
    membership      its signs of life, and what it agrees on with the other dispensers
    chores          what it does besides, and how often
    next_look       when a group of rules is looked at again
    publisher       makes messages of what was released, and has them published
release_pass        one pass over a group: lock, count, choose, charge, conclude
    choosing        candidates of every rule, and which of them go, by queues with room
        candidates_by_key   where keys take turns
        planning            within every limit, in memory
    permit_turns    permits among the calls, and what one that was asked for is told
"""
