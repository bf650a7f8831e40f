"""Calls that are not queued: their caller makes them, once the ledger has admitted them.

permit          the context managers and the decorator
    granted         what a permit can be told, and its end
    asking          what is asked for, checked
    waiting         how a permit is waited for: look, pass, pause
        request_rows    the row by which passes see a permit that waits
        chores          what a waiter does for want of a dispenser
    begun           the attempt once it is begun
    ending          what is written of a permit: sent, settled, ended
    apart           on which connection all of that is done
transport       permits for each request of an HTTP client, and requests' adapter
    httpx_transport
"""
