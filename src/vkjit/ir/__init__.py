"""The array IR: avals, programs, primitives; checker, text form and evaluator."""
