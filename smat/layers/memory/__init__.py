"""Memories of distant tokens beside a recurrence that forgets them at the boundary."""
