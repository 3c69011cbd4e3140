"""Works out the changes that a call proposes, and makes them after approval."""
