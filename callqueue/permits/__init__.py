"""Calls that are not queued: their caller makes them, once the ledger has admitted them.

permit          the context managers and the decorator
    granted         what a permit can be told, and its end
    asking          what is asked for, checked
    waiting         how a permit is waited for: look, pass, pause
        rows        its row among the calls, while it waits
    ending          what is written of a permit: sent, settled, ended
    apart           on which connection all of that is done
transport       permits for each request of an HTTP client, and requests' adapter
    httpx_transport
"""
