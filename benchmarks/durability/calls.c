/* Preloaded into a process: records the calls that change files below $CALLS_ROOT, or fails one.

Each call is appended to $CALLS_LOG as a header (see `Header`), paths relative to the root, and the
data that it wrote. With $CALLS_FAULT, "errno is_worker when call pattern", only the call number
`when` with that name whose path matches the pattern is recorded, and fails; errno 0 writes half of
the data. It is a call of process $CALLS_WORKER, or of another one.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

typedef struct {
    char call[16];
    int64_t is_worker, error, offset, new_size, path_bytes, other_bytes, data_bytes;
} Header;

static char root[PATH_MAX], failing_call[16], pattern[PATH_MAX];
static int log_file = -1, fault_error, is_worker;
static long when; /* 0: record all calls */
static atomic_long matches;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* beside `flock`, for threads */

__attribute__((constructor)) void calls_configure(void) {
    const char *root_text = getenv("CALLS_ROOT"), *fault = getenv("CALLS_FAULT");
    if (log_file >= 0) close(log_file);
    log_file = -1;
    when = matches = 0;
    if (!root_text || !realpath(root_text, root)) return;
    const char *worker = getenv("CALLS_WORKER");
    is_worker = worker && atoi(worker) == getpid();
    int fails_worker = is_worker;
    if (fault) sscanf(fault, "%d %d %ld %15s %s", &fault_error, &fails_worker, &when, failing_call, pattern);
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    log_file = real(getenv("CALLS_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    /* the call belongs to another process, or has failed in an earlier one */
    if (when && (fails_worker != is_worker || lseek(log_file, 0, SEEK_END))) log_file = -1;
}

/* Return a path relative to the root, or NULL if it is not below it. "" is the root itself. */
static const char *below(char *buffer, int folder, const char *path) {
    if (log_file < 0) return NULL;
    if (*path == '/') {
        snprintf(buffer, PATH_MAX, "%s", path);
    } else { /* relative to a folder, or "" for an open file */
        char link[64];
        snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, buffer, PATH_MAX - 1);
        if (size < 0) return NULL;
        snprintf(buffer + size, PATH_MAX - size, *path ? "/%s" : "%s", path);
    }
    size_t length = strlen(root);
    if (strncmp(buffer, root, length) || (buffer[length] && buffer[length] != '/')) return NULL;
    return buffer + length + (buffer[length] == '/');
}

static void record(const char *call, int error, int64_t offset, int64_t new_size, const char *path,
                   const char *other, const void *data, size_t size) {
    Header header = {"", is_worker, error, offset, new_size, strlen(path), strlen(other), size};
    strncpy(header.call, call, sizeof header.call - 1);
    struct iovec parts[] = {{&header, sizeof header}, {(void *)path, strlen(path)},
                            {(void *)other, strlen(other)}, {(void *)data, size}};
    if (writev(log_file, parts, 4) < 0) abort();
}

/* Begin a call; return whether it fails now, with `errno`. */
static int fails(const char *call, const char *path) {
    if (!path) return 0;
    if (when) {
        if (strcmp(call, failing_call) || fnmatch(pattern, path, 0) || ++matches != when) return 0;
        record(call, fault_error, 0, -1, path, "", NULL, 0);
        errno = fault_error;
        return 1;
    }
    pthread_mutex_lock(&mutex); /* what is recorded has the order of what happened */
    flock(log_file, LOCK_EX);
    return 0;
}

/* End a call that wrote `data` at `offset`, or changed the file's size to `new_size`, unless -1. */
static void done(const char *call, const char *path, int64_t result, int64_t offset,
                 int64_t new_size, const char *other, const void *data) {
    if (!path || when) return;
    int error = errno;
    record(call, result < 0 ? error : 0, offset, new_size, path, other, data,
           result > 0 && data ? result : 0);
    flock(log_file, LOCK_UN);
    pthread_mutex_unlock(&mutex);
    errno = error;
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)
#define PATH(folder, text) char buffer[PATH_MAX]; const char *path = below(buffer, folder, text)
/* A call on one path, by name and arguments of the real one. */
#define CALL(name, new_size, ...) \
    int result = fails(name, path) ? -1 : real(__VA_ARGS__); \
    done(name, path, result, 0, new_size, "", NULL); \
    return result

static int open_at(int folder, const char *text, int flags, int mode) {
    REAL(int, "openat", int, const char *, int, ...);
    if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE)
        return real(folder, text, flags, mode);
    PATH(folder, text);
    CALL("open", flags & O_TRUNC ? 0 : -1, folder, text, flags, mode);
}

#define MODE va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest)
int open(const char *text, int flags, ...) { MODE; return open_at(AT_FDCWD, text, flags, mode); }
int open64(const char *text, int flags, ...) { MODE; return open_at(AT_FDCWD, text, flags, mode); }
int openat(int folder, const char *text, int flags, ...) { MODE; return open_at(folder, text, flags, mode); }
int openat64(int folder, const char *text, int flags, ...) { MODE; return open_at(folder, text, flags, mode); }

static ssize_t write_at(const char *call, int file, const void *data, size_t size, off_t offset) {
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
    static ssize_t (*append)(int, const void *, size_t);
    if (!append) append = dlsym(RTLD_NEXT, "write");
    PATH(file, "");
    if (fails(call, path)) {
        if (fault_error) return -1;
        size = (size + 1) / 2;
    }
    ssize_t result = offset < 0 ? append(file, data, size) : real(file, data, size, offset);
    int error = errno;
    if (path && offset < 0) offset = lseek(file, 0, SEEK_CUR) - result;
    errno = error;
    done(call, path, result, offset, -1, "", data);
    return result;
}

ssize_t write(int file, const void *data, size_t size) { return write_at("write", file, data, size, -1); }
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) { return write_at("pwrite", file, data, size, offset); }
ssize_t pwrite64(int file, const void *data, size_t size, off_t offset) { return write_at("pwrite", file, data, size, offset); }

ssize_t sendfile(int to, int from, off_t *start, size_t size) {
    REAL(ssize_t, "sendfile", int, int, off_t *, size_t);
    PATH(to, "");
    off_t first = start ? *start : lseek(from, 0, SEEK_CUR);
    ssize_t result = fails("sendfile", path) ? -1 : real(to, from, start, size);
    int error = errno;
    void *data = path && result > 0 ? malloc(result) : NULL;
    if (data && pread(from, data, result, first) != result) abort();
    off_t offset = path ? lseek(to, 0, SEEK_CUR) - result : 0;
    errno = error;
    done("sendfile", path, result, offset, -1, "", data);
    free(data);
    return result;
}
ssize_t sendfile64(int to, int from, off_t *start, size_t size) { return sendfile(to, from, start, size); }

int fsync(int file) { REAL(int, "fsync", int); PATH(file, ""); CALL("fsync", -1, file); }
int fdatasync(int file) { REAL(int, "fdatasync", int); PATH(file, ""); CALL("fdatasync", -1, file); }
int ftruncate(int file, off_t size) { REAL(int, "ftruncate", int, off_t); PATH(file, ""); CALL("ftruncate", size, file, size); }
int ftruncate64(int file, off_t size) { return ftruncate(file, size); }
int unlink(const char *text) { REAL(int, "unlink", const char *); PATH(AT_FDCWD, text); CALL("unlink", -1, text); }
int rmdir(const char *text) { REAL(int, "rmdir", const char *); PATH(AT_FDCWD, text); CALL("rmdir", -1, text); }
int mkdir(const char *text, mode_t mode) { REAL(int, "mkdir", const char *, mode_t); PATH(AT_FDCWD, text); CALL("mkdir", -1, text, mode); }
int unlinkat(int folder, const char *text, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    PATH(folder, text);
    CALL(flags & AT_REMOVEDIR ? "rmdir" : "unlink", -1, folder, text, flags);
}
/* A call that gives the file at `text` the name `to`. */
#define NAMING(name) int name(const char *text, const char *to) { \
    REAL(int, #name, const char *, const char *); \
    PATH(AT_FDCWD, text); \
    char room[PATH_MAX]; \
    const char *other = path ? below(room, AT_FDCWD, to) : NULL; \
    int result = fails(#name, path) ? -1 : real(text, to); \
    done(#name, path, result, 0, -1, other ? other : "", NULL); \
    return result; \
}
NAMING(rename)
NAMING(link)
