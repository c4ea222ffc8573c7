// Runs every case; the one argument is the folder in which each gets an empty one, `native_tests-files`, for its files.

#include <cstdio>
#include <exception>
#include <filesystem>

#include "harness.hpp"

int main(int count, char **arguments) {
    if (count != 2) {
        std::fprintf(stderr, "usage: %s FOLDER\n", arguments[0]);
        return 2;
    }
    dsh::test::scratch() = std::filesystem::path(arguments[1]) / "native_tests-files";
    int failed = 0;
    for (const dsh::test::Case &each : dsh::test::cases()) {
        try {
            std::filesystem::remove_all(dsh::test::scratch());
            std::filesystem::create_directories(dsh::test::scratch());
            each.run();
            std::printf("ok      %s\n", each.name.c_str());
        } catch (const std::exception &error) {
            std::printf("FAILED  %s: %s\n", each.name.c_str(), error.what());
            ++failed;
        }
    }
    return failed == 0 ? 0 : 1;
}
