"""The soak: random traffic from many threads through one pool, every upload checked on the device."""
