"""The dispenser: releases calls as fast as the limits allow, and hands them to Celery.

dispenser           the loop of a process, what wakes it when a call is sent, its signs of life
    chores          what it does besides, and how often
    next_look       when a group of rules is looked at again
    publisher       makes messages of what was released, and has them published
release_pass        one pass over a group: lock, count, choose, charge, conclude
    choosing        candidates of every rule, and which of them go, by queues with room
        planning    within every limit, in memory
    turns           whose turn it is where keys take turns, and of permits that wait
"""
