"""What is asked about a call beside its tool's profile: who may, how much, who said yes, and whether it was stopped."""
