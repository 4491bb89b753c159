"""The cache server's decisions, pure: index, arena, leases, two-phase store, eviction. Events in, effects out."""
