/* Faults of a node, for LD_PRELOAD: another clock, and a slow disk.

   FAULT_CLOCK=3600        the time of day is an hour ahead
   FAULT_DISK=/some/path   FAULT_DISK_MS=50: opening, making, renaming and removing a file whose path contains
                           this text takes 50 ms longer, and so does every fsync

   Only the C library's functions are replaced: time stamps of files are those of the kernel, as with a file
   server that has a clock of its own. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long number(const char *variable) {
    const char *text = getenv(variable);
    return text ? atol(text) : 0;
}

/* -- the clock ------------------------------------------------------------------------------------ */

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = REAL(clock_gettime)(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        now->tv_sec += number("FAULT_CLOCK");
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    int result = REAL(gettimeofday)(now, zone);
    now->tv_sec += number("FAULT_CLOCK");
    return result;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result)
        *result = now.tv_sec;
    return now.tv_sec;
}

/* The kernel compares these times with its own clock. */
static struct timespec for_kernel(const struct timespec *deadline) {
    struct timespec shifted = *deadline;
    shifted.tv_sec -= number("FAULT_CLOCK");
    return shifted;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec now, shifted;
    if (!real)
        real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    /* A condition may wait by the monotonic clock, whose times are those since the machine started. */
    clock_gettime(CLOCK_REALTIME, &now);
    shifted = deadline->tv_sec > now.tv_sec / 2 ? for_kernel(deadline) : *deadline;
    return real(condition, mutex, &shifted);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    struct timespec shifted = for_kernel(deadline);
    return REAL(sem_timedwait)(semaphore, &shifted);
}

/* -- the disk ------------------------------------------------------------------------------------- */

static void wait_for_disk(const char *path) {
    const char *slow = getenv("FAULT_DISK");
    if (slow && (!path || strstr(path, slow)))
        usleep(1000 * number("FAULT_DISK_MS"));
}

static mode_t mode_of(int flags, va_list arguments) {
    int has_mode = (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE;
    return has_mode ? va_arg(arguments, mode_t) : 0;
}

#define OPEN(name)                                       \
    int name(const char *path, int flags, ...) {         \
        va_list arguments;                               \
        va_start(arguments, flags);                      \
        mode_t mode = mode_of(flags, arguments);         \
        va_end(arguments);                               \
        wait_for_disk(path);                             \
        return REAL(name)(path, flags, mode);            \
    }
OPEN(open)
OPEN(open64)

int rename(const char *from, const char *to) {
    wait_for_disk(to);
    return REAL(rename)(from, to);
}

int mkdir(const char *path, mode_t mode) {
    wait_for_disk(path);
    return REAL(mkdir)(path, mode);
}

int unlink(const char *path) {
    wait_for_disk(path);
    return REAL(unlink)(path);
}

int fsync(int file) {
    wait_for_disk(NULL);
    return REAL(fsync)(file);
}
