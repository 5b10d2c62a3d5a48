"""Conversations: where the blocks of each conversation's last turn are, for the next turn."""
