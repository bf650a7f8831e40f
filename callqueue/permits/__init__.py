"""Calls that are not queued: their caller makes them, once the ledger has admitted them.

permit          the context managers and the decorator
    granted         what a permit can be told, its end, and what is written of it
    asking          what is asked for, checked
    waiting         how a permit is waited for: look, pass, pause; and its row meanwhile
    apart           on which connection all of that is done
transport       permits for each request of an HTTP client, and requests' adapter
    httpx_transport
"""
