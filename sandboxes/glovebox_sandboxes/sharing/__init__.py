"""Fair shares: who gets what there is too little of, by an opaque key for whoever pays. Nothing of the server here."""
