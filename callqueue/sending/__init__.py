"""The way in: checks a call and writes it into the table, in the caller's transaction."""
