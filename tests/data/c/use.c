/* Compiled models in one program: the digits, in two sizes, a counter with a variable, and a sum wide enough for several threads. Prints "ok", or the line that failed. */
#define _POSIX_C_SOURCE 200809L
#include "counter.h"
#include "digits.h"
#include "wide.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                              \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            printf("line %d: %s: %s %s\n", __LINE__, #condition, digits_message(), counter_message()); \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

enum { N_THREADS = 8, N_RUNS = 50 };

static float images[DIGITS_BATCH_8_IMAGE_LEN];
static float expected[DIGITS_BATCH_8_PROBABILITIES_LEN];

/* Runs on a model of its own, or on a given one. */
static void *runs(void *given)
{
    digits_model *model = (digits_model *)given;
    float got[DIGITS_BATCH_8_PROBABILITIES_LEN];
    int i;
    if (!model) {
        digits_options options = {sizeof(digits_options), 1, NULL, NULL};
        CHECK(digits_open(&options, &model) == DIGITS_OK);
    }
    for (i = 0; i < N_RUNS; i++) {
        memset(got, 0, sizeof(got));
        CHECK(digits_run_batch_8(model, images, got) == DIGITS_OK);
        CHECK(memcmp(got, expected, sizeof(got)) == 0);
    }
    if (!given)
        CHECK(digits_close(model) == DIGITS_OK);
    return NULL;
}

static void on_threads(digits_model *model)
{
    pthread_t threads[N_THREADS];
    int i;
    for (i = 0; i < N_THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, runs, model) == 0);
    for (i = 0; i < N_THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

/* Memory that is aligned to elements only gives the same bits. */
static void misaligned(digits_model *model)
{
    float *in = (float *)malloc(sizeof(images) + 64), *out = (float *)malloc(sizeof(expected) + 64);
    CHECK(in && out);
    memcpy(in + 1, images, sizeof(images));
    CHECK(digits_run_batch_8(model, in + 1, out + 3) == DIGITS_OK);
    CHECK(memcmp(out + 3, expected, sizeof(expected)) == 0);
    free(in);
    free(out);
}

static void errors(digits_model *model)
{
    digits_options small = {4, 1, NULL, NULL};
    digits_model *none = NULL;
    const void *inputs[1];
    void *outputs[1];
    CHECK(digits_open(NULL, NULL) == DIGITS_INVALID && strstr(digits_message(), "model is NULL"));
    CHECK(digits_open(&small, &none) == DIGITS_INVALID && !none && strstr(digits_message(), "options.size is 4;"));
    CHECK(digits_run_batch_8(NULL, images, expected) == DIGITS_INVALID);
    CHECK(digits_run_batch_8(model, NULL, expected) == DIGITS_INVALID && strstr(digits_message(), "input \"image\" is NULL"));
    CHECK(digits_run_batch_8(model, images, NULL) == DIGITS_INVALID);
    CHECK(digits_run_batch_8(model, (const float *)((const char *)images + 1), expected) == DIGITS_INVALID);
    CHECK(digits_run_variant(model, 0, NULL, NULL) == DIGITS_INVALID);
    inputs[0] = images;
    outputs[0] = expected;
    CHECK(digits_run_variant(model, 7, inputs, outputs) == DIGITS_INVALID && strstr(digits_message(), "no variant 7"));
    CHECK(digits_set(model, "v", images, 4) == DIGITS_INVALID && strstr(digits_message(), "unknown variable"));
    CHECK(digits_close(NULL) == DIGITS_OK);
    CHECK(strlen(digits_describe(NULL)) == 0 && strstr(digits_describe(model), "2 variants"));
}

typedef struct {
    void (*share)(void *data, uint32_t i);
    void *data;
} share;

static void *one_share(void *given)
{
    share *s = (share *)given;
    s->share(s->data, 1);
    return NULL;
}

/* A host with a thread of its own; an odd one: the last share is asked for twice. */
static void host(void *context, uint32_t n, void (*function)(void *data, uint32_t i), void *data)
{
    pthread_t thread;
    share other;
    other.share = function;
    other.data = data;
    CHECK(n == 3);
    ++*(int *)context;
    CHECK(pthread_create(&thread, NULL, one_share, &other) == 0);
    function(data, 0);
    function(data, 2);
    function(data, 2);
    CHECK(pthread_join(thread, NULL) == 0);
}

/* A host that makes no calls at all: the caller does the work. */
static void idle(void *context, uint32_t n, void (*function)(void *data, uint32_t i), void *data)
{
    (void)n, (void)function, (void)data;
    ++*(int *)context;
}

static void hosted(void)
{
    static float x[WIDE_X_LEN], sum[WIDE_SUM_LEN], again[WIDE_SUM_LEN];
    int i, n_asked[2] = {0, 0};
    wide_options options[3] = {{sizeof(wide_options), 3, NULL, NULL}};
    options[1] = options[2] = options[0];
    options[1].parallel = host;
    options[1].context = &n_asked[0];
    options[2].parallel = idle;
    options[2].context = &n_asked[1];
    for (i = 0; i < WIDE_X_LEN; i++)
        x[i] = (float)(i % 101) / 8;
    for (i = 0; i < 3; i++) {
        wide_model *model = NULL;
        CHECK(wide_open(&options[i], &model) == WIDE_OK);
        memset(again, 0, sizeof(again));
        CHECK(wide_run(model, x, i == 0 ? sum : again) == WIDE_OK);
        CHECK(i == 0 || memcmp(sum, again, sizeof(sum)) == 0);
        CHECK(wide_close(model) == WIDE_OK);
    }
    CHECK(n_asked[0] > 0 && n_asked[1] > 0);
    /* Options of before there were such fields. */
    options[1].size = offsetof(wide_options, parallel);
    {
        wide_model *model = NULL;
        CHECK(wide_open(&options[1], &model) == WIDE_OK);
        i = n_asked[0];
        CHECK(wide_run(model, x, again) == WIDE_OK && i == n_asked[0]);
        CHECK(wide_close(model) == WIDE_OK);
    }
}

static void counting(void)
{
    counter_model *model = NULL;
    float x[COUNTER_X_LEN] = {1, 2}, sum[COUNTER_SUM_LEN], v[2] = {10, 20};
    CHECK(counter_open(NULL, &model) == COUNTER_OK);
    CHECK(counter_run(model, x, sum) == COUNTER_INVALID && strstr(counter_message(), "before it was assigned"));
    CHECK(counter_set(model, "v", v, 4) == COUNTER_INVALID && strstr(counter_message(), "has 8 bytes, got 4"));
    CHECK(counter_set(model, "w", v, 8) == COUNTER_INVALID && strstr(counter_message(), "unknown variable"));
    CHECK(counter_set(model, NULL, v, 8) == COUNTER_INVALID && counter_set(model, "v", NULL, 8) == COUNTER_INVALID);
    CHECK(counter_set(model, "v", v, sizeof(v)) == COUNTER_OK);
    CHECK(counter_run(model, x, sum) == COUNTER_OK && sum[0] == 11 && sum[1] == 22);
    CHECK(counter_run(model, x, sum) == COUNTER_OK && sum[0] == 12 && sum[1] == 24);
    CHECK(counter_get(model, "v", v, sizeof(v)) == COUNTER_OK && v[0] == 12 && v[1] == 24);
    CHECK(strcmp(counter_variable(model, 0), "v") == 0 && counter_variable(model, 1) == NULL);
    CHECK(counter_save(model, "counter.safetensors") == COUNTER_OK);
    CHECK(counter_save(model, "no/such/folder") == COUNTER_INVALID && counter_save(model, NULL) == COUNTER_INVALID);
    CHECK(counter_reset(model) == COUNTER_OK);
    CHECK(counter_get(model, "v", v, sizeof(v)) == COUNTER_INVALID);
    CHECK(counter_load(model, "use.c") == COUNTER_INVALID);
    CHECK(counter_load(model, "counter.safetensors") == COUNTER_OK);
    CHECK(counter_run(model, x, sum) == COUNTER_OK && sum[0] == 13 && sum[1] == 26);
    CHECK(counter_close(model) == COUNTER_OK);
}

/* Runs until the model is closed. */
static void *runs_until_closed(void *given)
{
    digits_model *model = (digits_model *)given;
    float got[DIGITS_BATCH_8_PROBABILITIES_LEN];
    for (;;) {
        digits_status status = digits_run_batch_8(model, images, got);
        if (status == DIGITS_INVALID)
            break;
        CHECK(status == DIGITS_OK && memcmp(got, expected, sizeof(got)) == 0);
    }
    CHECK(strstr(digits_message(), "is closed"));
    return NULL;
}

/* A model is closed while threads run it. */
static void closed_in_use(void)
{
    pthread_t threads[N_THREADS];
    digits_options options = {sizeof(digits_options), 2, NULL, NULL};
    digits_model *model = NULL;
    struct timespec moment = {0, 300000};
    int i;
    CHECK(digits_open(&options, &model) == DIGITS_OK);
    for (i = 0; i < N_THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, runs_until_closed, model) == 0);
    nanosleep(&moment, NULL);
    CHECK(digits_close(model) == DIGITS_OK);
    CHECK(digits_close(model) == DIGITS_INVALID && digits_reset(model) == DIGITS_INVALID);
    CHECK(strlen(digits_describe(model)) == 0 && digits_variable(model, 0) == NULL);
    for (i = 0; i < N_THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

/* A child runs and closes a model of its parent, whose threads it does not have, and opens another one. */
static void forked(void)
{
    digits_options options = {sizeof(digits_options), 3, NULL, NULL};
    digits_model *first = NULL, *model = NULL;
    pid_t child;
    int status = -1;
    CHECK(digits_open(&options, &first) == DIGITS_OK && digits_close(first) == DIGITS_OK);
    CHECK(digits_open(&options, &model) == DIGITS_OK);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(digits_run_batch_8(model, images, expected) == DIGITS_OK);
        CHECK(digits_close(model) == DIGITS_OK);
        CHECK(digits_open(&options, &model) == DIGITS_OK);
        CHECK(digits_run_batch_8(model, images, expected) == DIGITS_OK);
        CHECK(digits_close(model) == DIGITS_OK);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(digits_run_batch_8(model, images, expected) == DIGITS_OK);
    CHECK(digits_close(model) == DIGITS_OK);
}

/* argv: the number of times to open and close; anything behind it leaves out the fork, whose child keeps memory of threads that it does not have. */
int main(int argc, char **argv)
{
    digits_model *model = NULL;
    int i, n = argc > 1 ? atoi(argv[1]) : 1;
    for (i = 0; i < DIGITS_BATCH_8_IMAGE_LEN; i++)
        images[i] = (float)(i % 17) / 16;
    CHECK(digits_open(NULL, &model) == DIGITS_OK);
    CHECK(digits_run_batch_8(model, images, expected) == DIGITS_OK);
    misaligned(model);
    errors(model);
    CHECK(digits_run_batch_8(model, images, expected) == DIGITS_OK);
    on_threads(model);
    on_threads(NULL);
    counting();
    hosted();
    if (argc < 3)
        forked();
    for (i = 0; i < n; i++)
        closed_in_use();
    for (i = 0; i < n; i++) {
        digits_model *other = NULL;
        CHECK(digits_open(NULL, &other) == DIGITS_OK);
        CHECK(digits_close(other) == DIGITS_OK);
    }
    CHECK(digits_close(model) == DIGITS_OK);
    puts("ok");
    return 0;
}
