"""Engines answer Asks: who runs the clients, and how."""
