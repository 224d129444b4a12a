"""Which request runs when, where, and in which pages: host bookkeeping, without a device."""
