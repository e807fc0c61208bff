// Words and statements of PTX text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace interpreter {

[[noreturn]] void fail(int line, const std::string& message);  // throws std::runtime_error
std::string_view trimmed(std::string_view text);
// Returns the parts between separators outside brackets, without empty parts.
std::vector<std::string_view> split(std::string_view text, std::string_view separators);
bool is_number(std::string_view text);
uint64_t number_of(std::string_view text);  // 12, -1, 0x1F, 0f3F800000 (the bits of a float)

// Reader of a module's text; comments are skipped.
class Reader {
 public:
  explicit Reader(std::string_view text);
  bool done();
  int line() const { return line_; }
  char peek();
  void take(char c);                              // fails on a different character
  std::string_view until(std::string_view ends);  // text up to a character of `ends`, which stays
  std::string_view statement();                   // text up to the semicolon; braces inside are vectors
  std::string_view ahead(size_t count);

 private:
  void skip();
  std::string_view text_;
  size_t at_ = 0;
  int line_ = 1;
};

}  // namespace interpreter
