"""Tests of what is shipped: the wheel, its metadata, and its types as others see them."""
