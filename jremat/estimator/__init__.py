"""What a training run needs: a block traced with letters for its sizes, and a ledger of polynomials."""
