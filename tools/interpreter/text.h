// Words and statements of PTX text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace interpreter {

[[noreturn]] void fail(int line, const std::string& what);  // throws std::runtime_error
std::string_view trimmed(std::string_view text);
// The parts between separators that stand in no bracket; empty ones are left out.
std::vector<std::string_view> split(std::string_view text, std::string_view separators);
bool is_number(std::string_view text);
uint64_t number_of(std::string_view text);  // 12, -1, 0x1F, 0f3F800000 (the bits of a float)

// Goes through a module, whose comments it leaves out.
class Reader {
 public:
  explicit Reader(std::string_view text);
  bool done();
  int line() const { return line_; }
  char peek();
  void take(char c);                              // fails on another
  std::string_view until(std::string_view ends);  // one of these characters, which is left
  std::string_view statement();                   // up to its semicolon; braces in it are vectors
  std::string_view ahead(size_t count);

 private:
  void skip();
  std::string_view text_;
  size_t at_ = 0;
  int line_ = 1;
};

}  // namespace interpreter
