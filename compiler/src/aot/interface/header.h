/* The model "@NAME@", compiled by gristmill @VERSION@. C99 and C++.
 *
 * Threads: any number of threads may use a model; its runs take turns, those of several models do not. A child of fork() has none of
 * the threads of models that were opened before: it can close them, and run those of one device on one thread. Open models after the fork.
 * Closing: a model lives until its last run has ended, so closing may overlap with its runs, which end as usual. A call that comes
 * later with the same handle returns @UPPER@_INVALID. Texts of a model are good until it is closed.
 * Memory: tensors are dense and row-major, at any address that the type of their elements has. Outputs overlap neither inputs nor each
 * other. A variant that runs for the first time makes its memory; later runs allocate nothing.
 * Nothing is printed, no signal is handled, no environment variable is read. Code in a library is trusted as the process is: open only
 * files that you would run.
 *
 * Types: bool is a byte of 0 or 1; f16, bf16 and floats of 8 bits are given as their bits.
 * Variables:
@VARIABLES@ */
#ifndef @UPPER@_H
#define @UPPER@_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct @P@_model @P@_model;

/* The exit codes of gristmill's programs. */
typedef enum {
    @UPPER@_OK = 0,
    @UPPER@_INTERNAL = 1,      /* a bug in gristmill */
    @UPPER@_INVALID = 2,       /* an argument, an index in a tensor that is out of range, or a damaged file */
    @UPPER@_UNSUPPORTED = 3,   /* this CPU lacks instructions; the message says which */
    @UPPER@_OUT_OF_MEMORY = 5,
    @UPPER@_DEVICE_FAILED = 6
} @P@_status;

/* A host's threads: makes the calls share(data, 0) to share(data, n - 1), side by side where it can, and returns when all of them have
 * returned. Each works until nothing is left to do, so calls that are made one after another, twice or not at all cost time only. They
 * may be made from any thread, and never wait for each other. Threads that run models ask at the same time. */
typedef void (*@P@_parallel)(void *context, uint32_t n, void (*share)(void *data, uint32_t i), void *data);

/* 0 means the default. Later versions append fields. */
typedef struct {
    size_t size;               /* sizeof(@P@_options) */
    uint32_t threads;          /* those of callers included; 0: one per core that the process may use; 1: that of the caller only */
    @P@_parallel parallel;     /* in place of threads of the model's own; n above is at most the number of threads */
    void *context;             /* for it */
} @P@_options;

/* Opens the model; options may be NULL. */
@P@_status @P@_open(const @P@_options *options, @P@_model **model);
/* Closes the model. Its threads end and its memory is freed here, or when its last run ends. NULL is allowed. */
@P@_status @P@_close(@P@_model *model);

/* A variable's value: all of its bytes. Both wait for the end of a run that assigns variables. */
@P@_status @P@_set(@P@_model *model, const char *variable, const void *value, size_t bytes);
@P@_status @P@_get(@P@_model *model, const char *variable, void *value, size_t bytes);
/* The label of a variable by number, 0 for the first; NULL behind the last one. */
const char *@P@_variable(const @P@_model *model, uint32_t number);
/* All variables to a safetensors file and back, by label. A file is written as a whole or not at all, and is on the disk at the end. Loading
 * sets all that the file has, or none when one is unknown or of another type; the others stay as they are. */
@P@_status @P@_save(@P@_model *model, const char *path);
@P@_status @P@_load(@P@_model *model, const char *path);
/* All variables as they were when the model was opened. */
@P@_status @P@_reset(@P@_model *model);

/* What went wrong in the last call of this thread that did not return @UPPER@_OK; good until its next one. Never NULL. */
const char *@P@_message(void);
/* One line about the model; good until it is closed. */
const char *@P@_describe(const @P@_model *model);

/* Runs a variant, by number, on the addresses of its inputs and outputs in order. The functions below know the types. */
@P@_status @P@_run_variant(@P@_model *model, uint32_t variant, const void *const *inputs, void *const *outputs);
