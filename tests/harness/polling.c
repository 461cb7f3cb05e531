/* Goes before libc (LD_PRELOAD): gloo's thread asks at once, and again and again, while what has come waits for a
   receiver that has not. Ranks that wait so take most of two cores from those that they wait for. From the ninth
   answer in a row that it need not wait for, the thread sleeps before it asks. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/epoll.h>
#include <time.h>

int epoll_wait(int set, struct epoll_event *events, int most, int milliseconds) {
  static int (*next)(int, struct epoll_event *, int, int);
  static __thread int at_once;
  if (!next) next = (int (*)(int, struct epoll_event *, int, int))dlsym(RTLD_NEXT, "epoll_wait");
  if (at_once > 8) nanosleep(&(struct timespec){0, 50000}, 0);
  int found = next(set, events, most, milliseconds);
  at_once = found > 0 ? at_once + 1 : 0;
  return found;
}
