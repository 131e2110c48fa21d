/* Preloaded into a process: makes the Nth system call below one folder fail with a chosen errno, once.
   Calls are counted whether they read or change something. Headers that declare these functions otherwise (open is
   variadic, stat has two structures) are left out on purpose: 64-bit Linux passes all arguments in the same way. */
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define HERE (-100) /* AT_FDCWD */
#define NEXT ((void *)-1l) /* RTLD_NEXT */

void *dlsym(void *handle, const char *name);
int dirfd(void *folder);

static char prefix[PATH_MAX];
static atomic_int armed;
static atomic_long counter;
static long nth;
static int code;
static char failed[64];

void faults_below(const char *folder) { snprintf(prefix, sizeof prefix, "%s/", folder); }
/* Counts from 0 again; n: the call that is to fail, 0 for none. */
void faults_arm(long n, int error) {
  counter = 0;
  nth = n;
  code = error;
  failed[0] = 0;
  armed = 1;
}
void faults_disarm(void) { armed = 0; }
long faults_count(void) { return counter; }
const char *faults_failed(void) { return failed; }

static int below(int at, const char *path) {
  char full[2 * PATH_MAX], base[PATH_MAX] = "", link[64];
  if (path[0] != '/' && at == HERE) {
    if (!getcwd(base, sizeof base)) return 0;
  } else if (path[0] != '/') {
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    if (readlink(link, base, sizeof base - 1) < 0) return 0;
  }
  snprintf(full, sizeof full, "%s/%s/", base[0] ? base : "", path[0] == '/' ? path + 1 : path);
  return !strncmp(full, prefix, strlen(prefix));
}

static int fails(const char *call, int at, const char *path) {
  if (!armed) return 0;
  int before = errno, hit = below(at, path) && ++counter == nth;
  if (hit) snprintf(failed, sizeof failed, "%s", call);
  errno = hit ? code : before;
  return hit;
}

#define CALL(result, name, wrong, parameters, arguments, at, path) \
  result name parameters { \
    static result(*real) parameters; \
    if (!real) real = (result(*) parameters)dlsym(NEXT, #name); \
    if (fails(#name, at, path)) return wrong; \
    return real arguments; \
  }

CALL(int, open, -1, (const char *p, int f, unsigned m), (p, f, m), HERE, p)
CALL(int, open64, -1, (const char *p, int f, unsigned m), (p, f, m), HERE, p)
CALL(int, openat, -1, (int d, const char *p, int f, unsigned m), (d, p, f, m), d, p)
CALL(int, openat64, -1, (int d, const char *p, int f, unsigned m), (d, p, f, m), d, p)
CALL(ssize_t, read, -1, (int d, void *b, size_t n), (d, b, n), d, "")
CALL(ssize_t, write, -1, (int d, const void *b, size_t n), (d, b, n), d, "")
CALL(int, fsync, -1, (int d), (d), d, "")
CALL(int, flock, -1, (int d, int o), (d, o), d, "")
CALL(int, fstat, -1, (int d, void *s), (d, s), d, "")
CALL(int, fstat64, -1, (int d, void *s), (d, s), d, "")
CALL(int, stat, -1, (const char *p, void *s), (p, s), HERE, p)
CALL(int, stat64, -1, (const char *p, void *s), (p, s), HERE, p)
CALL(int, lstat, -1, (const char *p, void *s), (p, s), HERE, p)
CALL(int, lstat64, -1, (const char *p, void *s), (p, s), HERE, p)
CALL(int, fstatat, -1, (int d, const char *p, void *s, int f), (d, p, s, f), d, p)
CALL(int, fstatat64, -1, (int d, const char *p, void *s, int f), (d, p, s, f), d, p)
CALL(int, access, -1, (const char *p, int m), (p, m), HERE, p)
CALL(int, rename, -1, (const char *p, const char *q), (p, q), HERE, p)
CALL(int, renameat, -1, (int d, const char *p, int e, const char *q), (d, p, e, q), d, p)
CALL(int, link, -1, (const char *p, const char *q), (p, q), HERE, p)
CALL(int, linkat, -1, (int d, const char *p, int e, const char *q, int f), (d, p, e, q, f), d, p)
CALL(int, unlink, -1, (const char *p), (p), HERE, p)
CALL(int, unlinkat, -1, (int d, const char *p, int f), (d, p, f), d, p)
CALL(int, mkdir, -1, (const char *p, unsigned m), (p, m), HERE, p)
CALL(int, mkdirat, -1, (int d, const char *p, unsigned m), (d, p, m), d, p)
CALL(int, futimens, -1, (int d, const void *t), (d, t), d, "")
CALL(int, utimensat, -1, (int d, const char *p, const void *t, int f), (d, p, t, f), d, p)
CALL(void *, opendir, NULL, (const char *p), (p), HERE, p)
CALL(void *, fdopendir, NULL, (int d), (d), d, "")
CALL(void *, readdir, NULL, (void *f), (f), dirfd(f), "")
CALL(void *, readdir64, NULL, (void *f), (f), dirfd(f), "")

/* One that fails has closed its file all the same. */
int close(int d) {
  static int (*real)(int);
  if (!real) real = (int (*)(int))dlsym(NEXT, "close");
  int hit = fails("close", d, ""), result = real(d);
  if (hit) errno = code;
  return hit ? -1 : result;
}
