// Compatibility header, included before every file. _C thereby loads on systems older than the build machine: glibc
// 2.28 and the libstdc++ of GCC 8 (test_wheel.py). portable.cpp defines functions absent from the old libstdc++.
#pragma once

#include <cstddef>  // the macros of the C and C++ libraries

#ifdef __GLIBC__
#if defined(__x86_64__)
#define FLASHPLUG_OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FLASHPLUG_OLDEST "GLIBC_2.17"
#endif
#endif

#ifdef FLASHPLUG_OLDEST
// glibc keeps the old version of each function beside the new one. The new versions differ in their library, and hypot
// also in rounding.
#define FLASHPLUG_USE_OLDEST(name) __asm__(".symver " #name "," #name "@" FLASHPLUG_OLDEST)
FLASHPLUG_USE_OLDEST(dlopen);
FLASHPLUG_USE_OLDEST(dlsym);
FLASHPLUG_USE_OLDEST(dlerror);
FLASHPLUG_USE_OLDEST(dladdr);
FLASHPLUG_USE_OLDEST(hypot);
FLASHPLUG_USE_OLDEST(pthread_once);
FLASHPLUG_USE_OLDEST(pthread_attr_getstack);
FLASHPLUG_USE_OLDEST(pthread_getattr_np);
#undef FLASHPLUG_USE_OLDEST
#endif
