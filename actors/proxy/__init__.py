"""The Proxy: validates, hashes, stamps and appends rows, and ticks the channels it owns."""
