"""lightstep inside other libraries: their loops, with a strategy's optimizer. Import the module of the library."""
