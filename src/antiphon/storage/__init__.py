"""Holders of KV bytes."""
