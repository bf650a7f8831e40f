"""`make demo`: 300 calls under three rules, to a vendor that counts them too."""
