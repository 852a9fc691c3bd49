/* Runs a compiled model of any name: bits LIBRARY PREFIX THREADS [-i FILE | -o FILE BYTES]..., inputs and outputs as their bytes. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    size_t size;
    uint32_t threads;
} options;

typedef int opens(const options *, void **);
typedef int runs(void *, uint32_t, const void *const *, void *const *);
typedef int closes(void *);
typedef const char *says(void);

static void *library;
static const char *prefix;

static void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    exit(1);
}

/* A function of the model, as bits that fit a pointer to it. */
static void find(const char *name, void *function)
{
    char full[128];
    void *found;
    snprintf(full, sizeof(full), "%s_%s", prefix, name);
    found = dlsym(library, full);
    if (!found)
        fail(dlerror());
    memcpy(function, &found, sizeof(found));
}

/* Room for so many bytes, at an address that suits any element. */
static void *room(size_t bytes)
{
    void *made = malloc(bytes + 1);
    if (!made)
        fail("no memory");
    return made;
}

static void *contents(const char *path)
{
    FILE *file = fopen(path, "rb");
    void *made;
    long bytes;
    if (!file || fseek(file, 0, SEEK_END) || (bytes = ftell(file)) < 0 || fseek(file, 0, SEEK_SET))
        fail(path);
    made = room((size_t)bytes);
    if (fread(made, 1, (size_t)bytes, file) != (size_t)bytes || fclose(file))
        fail(path);
    return made;
}

int main(int argc, char **argv)
{
    const void *inputs[64];
    void *outputs[64];
    const char *files[64];
    size_t sizes[64];
    int i, n_inputs = 0, n_outputs = 0;
    options given = {sizeof(options), 0};
    void *model = NULL;
    opens *open;
    runs *run;
    closes *close;
    says *message;
    if (argc < 4)
        fail("bits LIBRARY PREFIX THREADS [-i FILE | -o FILE BYTES]...");
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fail(dlerror());
    prefix = argv[2];
    given.threads = (uint32_t)atoi(argv[3]);
    for (i = 4; i + 1 < argc && n_inputs < 64 && n_outputs < 64; i += 2) {
        if (strcmp(argv[i], "-i") == 0) {
            inputs[n_inputs++] = contents(argv[i + 1]);
        } else {
            files[n_outputs] = argv[i + 1];
            sizes[n_outputs] = (size_t)strtoull(argv[i + 2], NULL, 10);
            outputs[n_outputs] = room(sizes[n_outputs]);
            n_outputs++;
            i++;
        }
    }
    find("open", &open);
    find("run_variant", &run);
    find("close", &close);
    find("message", &message);
    if (open(&given, &model) || run(model, 0, inputs, outputs) || close(model))
        fail(message());
    for (i = 0; i < n_outputs; i++) {
        FILE *file = fopen(files[i], "wb");
        if (!file || fwrite(outputs[i], 1, sizes[i], file) != sizes[i] || fclose(file))
            fail(files[i]);
    }
    return 0;
}
