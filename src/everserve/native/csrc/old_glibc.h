/* Included before everything else in libraries of wheels, so that they also load where glibc is older than here.

   glibc 2.32 and 2.34 moved functions from libpthread to libc, and gave them a second version there. What is linked with
   the first version runs with both. */

#define _GNU_SOURCE
#include <features.h>

#if defined(__GLIBC__) && defined(__x86_64__)
#define FIRST_VERSION "GLIBC_2.2.5"
#define FIRST_VERSION_OF_NAMES "GLIBC_2.12"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define FIRST_VERSION "GLIBC_2.17"
#define FIRST_VERSION_OF_NAMES "GLIBC_2.17"
#endif

#if defined(FIRST_VERSION)
#define LINK_WITH(name, version) __asm__(".symver " #name ", " #name "@" version)
LINK_WITH(pthread_create, FIRST_VERSION);
LINK_WITH(pthread_detach, FIRST_VERSION);
LINK_WITH(pthread_join, FIRST_VERSION);
LINK_WITH(pthread_mutex_trylock, FIRST_VERSION);
LINK_WITH(pthread_sigmask, FIRST_VERSION);
LINK_WITH(pthread_setname_np, FIRST_VERSION_OF_NAMES);
#endif
