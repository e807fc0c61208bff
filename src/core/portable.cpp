// Definitions from newer versions of libstdc++ and glibc, absent on older systems (portable.h). The linker keeps
// the definitions local to this library (exports.map).
#include <new>
#include <sstream>

#if defined(FLASHPLUG_OLDEST) && defined(__GLIBCXX__)

// Members declared by headers as a part of the library: the move of a stream's text, and a stream's first constructor.
template class std::basic_stringbuf<char>;
template class std::basic_stringstream<char>;

namespace std {
void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}  // namespace std

// False: pointers are counted with atomic instructions, as in any process with threads.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;

#endif
