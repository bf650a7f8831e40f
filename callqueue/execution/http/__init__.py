"""One HTTP request: to addresses that were checked, within its time, with every byte counted."""
