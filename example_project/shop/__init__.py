"""A shop: it asks a vendor for prices, and posts its orders to channels of a chat."""
