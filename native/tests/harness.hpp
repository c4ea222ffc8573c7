// A minimal test harness: cases that register themselves, and a check that reports its place and condition.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace dsh::test {

struct Case {
    std::string name;
    std::function<void()> run;
};

inline std::vector<Case> &cases() {
    static std::vector<Case> all;
    return all;
}

struct Register {
    Register(std::string name, std::function<void()> run) { cases().push_back({std::move(name), std::move(run)}); }
};

// The folder for the files of a case, which main empties before each.
inline std::filesystem::path &scratch() {
    static std::filesystem::path folder;
    return folder;
}

inline void check(bool holds, const char *what, const char *file, int line) {
    if (!holds) {
        throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
    }
}

class Random {
  public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}
    // Both ends included.
    std::uint64_t between(std::uint64_t low, std::uint64_t high) {
        return std::uniform_int_distribution<std::uint64_t>(low, high)(engine_);
    }
    bool coin() { return between(0, 1) == 1; }

  private:
    std::mt19937_64 engine_;
};

} // namespace dsh::test

#define TEST(name)                                                                                                     \
    static void name();                                                                                                \
    static const dsh::test::Register register_##name(#name, name);                                                     \
    static void name()
#define CHECK(condition) dsh::test::check(static_cast<bool>(condition), #condition, __FILE__, __LINE__)
