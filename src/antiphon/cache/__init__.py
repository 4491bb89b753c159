"""The cache server's decisions, pure: index, arena books, leases, two-phase store, eviction, quota. Events in, effects out."""
