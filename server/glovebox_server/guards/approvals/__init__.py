"""Questions to people: who is asked, what they saw, what they said, and which one call a yes is good for."""
